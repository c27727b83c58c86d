from llmtailor.cli.main import main

main()
