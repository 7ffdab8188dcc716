"""From one topology file everything that puts openbook on machines."""
