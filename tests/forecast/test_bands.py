"""How far times were off: the band of the table nearest to a run."""

from __future__ import annotations

import numpy as np
import pytest

from supernode.errors import SpecError
from supernode.forecast.efficiency import card_model
from supernode.forecast.trust import band
from supernode.validation.cases import load_cases
from supernode.validation.score import Forecaster, errors


def test_four_of_five_unseen_runs_of_vtrain_are_within_the_band_of_their_like() -> None:
    cases = [case for case in load_cases() if case.table == "vtrain_multi" and not case.fitting]
    forecaster = Forecaster(cases)

    found = np.abs(errors(forecaster.forecast(), forecaster.seconds))

    # Rounded parameters in the file move an error by less than half a percent.
    assert np.mean(found <= band("A100-80, 4 NICs", cards=512, width=8192) + 0.005) >= 0.8


def test_mixtures_are_less_sure_than_dense_models() -> None:
    dense = band("GB200", cards=256, width=16384)

    assert band("GB200", cards=256, width=4096, mixtures=True) > dense


@pytest.mark.parametrize("card", ["A100-80", "H100", "B200", "GB300"])
def test_every_generation_has_bands_of_its_own(card: str) -> None:
    assert card_model(card).generation
    assert 0.02 < band(card, cards=64, width=8192) < 0.4


def test_a_card_without_published_runs_has_no_band() -> None:
    with pytest.raises(SpecError, match="no parameters"):
        band("Ascend 910B", cards=8, width=4096)
