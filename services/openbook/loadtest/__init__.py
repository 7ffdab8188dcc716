"""`openbook loadtest`: what callers get from an endpoint under load. It knows the endpoint by its protocols alone."""
