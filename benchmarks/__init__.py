"""What partc's programs and its compiler cost, measured beside PyTorch's own layouts."""
