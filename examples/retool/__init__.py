"""Mathematics with a Python interpreter as a tool."""
