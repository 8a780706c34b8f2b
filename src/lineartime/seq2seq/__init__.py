"""Sequence to sequence: encoder-decoders, and how they write."""

from lineartime.seq2seq.model import EncoderDecoder, EncoderDecoderConfig, beam_search, encoder_decoder_config

__all__ = ["EncoderDecoder", "EncoderDecoderConfig", "beam_search", "encoder_decoder_config"]
