"""Solvers, rewriters and a selector that work on one problem and are trained together."""
