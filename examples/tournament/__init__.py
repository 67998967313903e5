"""Rewards from comparing the answers to one prompt with each other."""
