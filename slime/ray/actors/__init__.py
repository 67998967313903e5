"""The processes of trainers and engines."""
