"""Scripts that read the arguments of an installed package. They run in a helper process, by path."""
