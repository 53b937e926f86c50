"""How is a user's module traced and cut into stages without a rewrite, and proved to be the same?"""
