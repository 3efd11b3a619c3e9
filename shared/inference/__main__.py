from shared.inference.process import main

if __name__ == "__main__":
    main()
