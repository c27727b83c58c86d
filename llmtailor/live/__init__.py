"""A live training: which tensors of this process are which states. Savers and attestation ask it."""
