"""The saver in other people's trainers, without a change to their code.

``llmtailor run`` starts any script around the Trainer of transformers with a saver (`launched`); axolotl and ms-swift
load a module from here by its name. docs/integrations.md has an example of each.
"""
