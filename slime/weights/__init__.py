"""Forms of weights: Hugging Face files, changes between versions, quantized formats, pieces for peer-to-peer pushes."""
