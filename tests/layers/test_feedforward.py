import torch

from lineartime.layers import GLU, MLP


def test_glu_is_about_as_large_as_an_mlp_of_the_same_expansion() -> None:
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in (MLP(768), GLU(768))]
    assert abs(sizes[0] - sizes[1]) / sizes[0] < 0.001


def test_each_token_is_on_its_own() -> None:
    for layer in (MLP(8), GLU(8)):
        x = torch.randn(2, 5, 8)
        torch.testing.assert_close(layer(x)[:, 2:3], layer(x[:, 2:3]))
