"""Real training: tiny models under the stock Trainer and DeepSpeed ZeRO-3, on a few CPU ranks."""
