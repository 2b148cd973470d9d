"""What runs models to score them: predictions, losses, questions, attacks, and lm-evaluation-harness."""

from .gsm8k import generate_answers
from .predictions import accuracy, correct, predict
from .attack import Attack, drop_words, embedding_neighbours, exchange_words, word_attack
from .questions import Scores, score
from .token_losses import TokenLosses, nats_per_token, token_loss, token_losses
