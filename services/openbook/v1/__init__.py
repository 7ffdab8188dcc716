"""Generated from protos/openbook/v1 by `make protos`. Never edited."""
