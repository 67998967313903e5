"""Long documents, read chunk by chunk into a memory that the model writes itself."""
