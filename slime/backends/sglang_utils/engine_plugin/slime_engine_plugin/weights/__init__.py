"""Receivers of weights."""
