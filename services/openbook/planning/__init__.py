"""How many machines, of which kind, for how much: sizes and times predicted, held against what was measured."""
