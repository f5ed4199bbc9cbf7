"""Dr. GRPO: GRPO without the two divisions that bias it; see docs/customization.md."""
