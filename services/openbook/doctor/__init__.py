"""What may keep openbook from serving well on this machine, or from where it looks."""
