"""Ray Serve, thin: the composition root, the ingress, and the models as deployments."""
