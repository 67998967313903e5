"""Users' functions: looked up, checked, called in either form, named in every error."""
