"""The residual network is the published one."""

from __future__ import annotations

import torch

from supernode.models.resnet import ResNet


def test_resnet_152_has_the_published_parameters_and_shapes() -> None:
    with torch.device("meta"):
        whole = ResNet()
        features = whole.layer4(whole.layer3(whole.layer2(torch.empty(1, 256, 56, 56))))
        logits = whole(torch.empty(2, 3, 224, 224))

    # torchvision's resnet152: 60,192,808 parameters, 932 entries in its state (5 a norm of which 3 are buffers).
    assert sum(parameter.numel() for parameter in whole.parameters()) == 60_192_808
    assert len(whole.state_dict()) == 932
    assert features.shape == (1, 2048, 7, 7)
    assert logits.shape == (2, 1000)


def test_resnet_50_has_the_published_parameters() -> None:
    with torch.device("meta"):
        whole = ResNet((3, 4, 6, 3))

    assert sum(parameter.numel() for parameter in whole.parameters()) == 25_557_032


def test_small_forms_learn() -> None:
    torch.manual_seed(0)
    model = ResNet((1, 1), width=4, classes=3)
    images, classes = torch.randn(12, 3, 32, 32), torch.arange(12) % 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(15):
        loss = torch.nn.functional.cross_entropy(model(images), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    assert losses[-1] < losses[0] / 3
