"""What callers meet: one question over gRPC or HTTP, admitted, checked, answered or refused by name."""
