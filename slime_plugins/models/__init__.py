"""Layer specifications (``--spec MODULE FUNCTION``) of the families that are more than Megatron's own layers."""
