"""Training: `loop.train` runs it, `config.TrainConfig` holds its options, `parallel` divides it over processes."""
