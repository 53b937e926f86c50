"""A plan made real on one rank: where it stands in the mesh, its part of the model, and how parts add up."""
