"""Functions of users: looked up, checked, called sync or async, named in every error."""
