"""Fine-tuning: retriever and generator end to end (section 2.4), and the bi-encoder that a retriever begins as."""
