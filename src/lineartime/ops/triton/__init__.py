"""The attentions of GAU and FLASH as Triton kernels. Triton is imported only by the files of this package."""
