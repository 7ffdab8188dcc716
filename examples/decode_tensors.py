"""The mathematics alone: answers and losses on plain tensors, with any encoder-decoder of transformers.

    python examples/decode_tensors.py

Two questions with three passages each, as token ids; the model has random weights, put in your own.
"""

from math import exp

import torch
from transformers import BartConfig, BartForConditionalGeneration

from openbook.core.types import Formulation, GenerationSettings
from openbook.models.decoding import generate
from openbook.models.marginal import log_likelihood

torch.manual_seed(0)
config = BartConfig(vocab_size=200, d_model=32, encoder_layers=1, decoder_layers=1, init_std=0.5)
model = BartForConditionalGeneration(config).eval()

n, k = 2, 3
context_ids = torch.randint(5, 200, (n * k, 20))  # question and passage, as the generator reads them
contexts = context_ids, torch.ones_like(context_ids), torch.randn(n, k)  # with mask and retrieval scores

for formulation in Formulation:
    settings = GenerationSettings(formulation=formulation, n_beams=4, max_new_tokens=6)
    for answer in generate(model, *contexts, settings):
        posterior = ", ".join(f"{exp(p):.2f}" for p in answer.log_posterior)
        print(f"RAG-{formulation}: tokens {list(answer.token_ids)}, log p {answer.log_likelihood:.2f}, on {posterior}")

labels = torch.tensor([[11, 12, 2], [13, 2, -100]])  # answers with end-of-sequence, padded with -100
loss = -log_likelihood(model, *contexts, labels, Formulation.SEQUENCE).sum()
loss.backward()
print(f"loss {loss.item():.2f}, its gradient reaches {sum(p.grad is not None for p in model.parameters())} parameters")
