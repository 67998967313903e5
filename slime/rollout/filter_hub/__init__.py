"""Dynamic sampling filters: which finished groups are worth training on."""
