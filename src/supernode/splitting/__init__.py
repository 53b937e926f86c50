"""How is a user's module traced, cut and split without a rewrite?"""
