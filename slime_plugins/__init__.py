"""Parts that runs may use and that slime itself does not import."""
