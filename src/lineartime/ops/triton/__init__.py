"""The attentions of GAU and FLASH as Triton kernels; to import this package is not to import Triton: its files do that."""
