"""Scenarios in which time and mechanism decide: what came first, and what each cause needs before, at and after."""
