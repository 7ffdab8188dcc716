"""The use case: a question becomes an answer with its evidence. Knows the Protocols in `ports`, and nobody behind them."""
