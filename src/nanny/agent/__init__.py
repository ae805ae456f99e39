"""What an AI agent may ask: the tools, prompts and pages that `nanny mcp` serves. Nothing here imports the protocol or torch."""
