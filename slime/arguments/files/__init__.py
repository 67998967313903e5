"""The YAML files that flags name."""
