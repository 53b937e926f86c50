"""Advice before a run: what is asked, what a search answers, which machine, and what a whole project takes.

May import what is below it, no torch; `control` hands it to people.
"""
