"""Evaluations of several data sets, each with settings and a reward of its own."""
