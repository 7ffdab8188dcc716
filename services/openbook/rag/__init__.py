"""The use case: a question becomes an answer with its evidence. Knows Protocols, not those behind them."""
