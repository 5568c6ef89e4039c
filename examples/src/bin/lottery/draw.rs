//! The job, and what a replica has to tell about it.

use std::{fmt, str::FromStr, time::Duration};

use lock_runtime::{LockError, LockErrorKind, distributed_lock};
use rand::seq::IteratorRandom;
use tokio::time::sleep;

/// How many win.
const WINNERS: usize = 10;
/// What drawing one winner takes.
const SUSPENSE: Duration = Duration::from_millis(10);

const PARTICIPANTS: [&str; 40] = [
    "Ada",
    "Alan",
    "Anita",
    "Barbara",
    "Bjarne",
    "Brian",
    "Cliff",
    "Dennis",
    "Donald",
    "Dorothy",
    "Edsger",
    "Evelyn",
    "Frances",
    "Fred",
    "Grace",
    "Guido",
    "Hedy",
    "Ivan",
    "Jean",
    "John",
    "Joan",
    "Katherine",
    "Ken",
    "Kurt",
    "Leslie",
    "Linus",
    "Lynn",
    "Margaret",
    "Mary",
    "Maurice",
    "Nancy",
    "Niklaus",
    "Radia",
    "Richard",
    "Robin",
    "Shafi",
    "Sophie",
    "Stephanie",
    "Tony",
    "Yukihiro",
];

/// Draws the winners: one replica, once.
///
/// - `no_wait`: who does not get the lock at once has nothing to do.
/// - `min_hold`: the draw is short, and clocks differ. The lock is kept for longer than any two of them do.
/// - `lease`: if the drawing replica dies, another one may draw after so long.
#[distributed_lock(key = "lottery:draw", global, no_wait, min_hold = "3s", lease = "10s")]
async fn draw() -> Result<Vec<&'static str>, LockError> {
    let winners = PARTICIPANTS
        .iter()
        .copied()
        .sample(&mut rand::rng(), WINNERS);
    for _ in &winners {
        sleep(SUSPENSE).await;
    }
    Ok(winners)
}

/// What became of the job on one replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Drew(Vec<String>),
    Skipped,
    Failed(String),
}

/// Runs the job as a scheduler would.
pub(crate) async fn fire() -> Outcome {
    match draw().await {
        Ok(winners) => Outcome::Drew(winners.into_iter().map(str::to_owned).collect()),
        Err(error) if error.kind() == LockErrorKind::Contended => Outcome::Skipped,
        Err(error) => Outcome::Failed(format!("{error:#}")),
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Drew(winners) => write!(f, "drew {}", winners.join(", ")),
            Self::Skipped => f.write_str("skipped"),
            Self::Failed(why) => write!(f, "failed {why}"),
        }
    }
}

impl FromStr for Outcome {
    type Err = anyhow::Error;

    fn from_str(line: &str) -> anyhow::Result<Self> {
        match line.split_once(' ').unwrap_or((line, "")) {
            ("drew", winners) => Ok(Self::Drew(winners.split(", ").map(str::to_owned).collect())),
            ("skipped", "") => Ok(Self::Skipped),
            ("failed", why) => Ok(Self::Failed(why.to_owned())),
            _ => anyhow::bail!("{line:?} is not what a replica says"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outcome_is_read_as_it_was_written() {
        let drew = Outcome::Drew(vec!["Ada".into(), "Alan".into()]);
        for outcome in [
            drew,
            Outcome::Skipped,
            Outcome::Failed("lock lottery:draw: the store is out of reach".into()),
        ] {
            assert_eq!(outcome.to_string().parse::<Outcome>().unwrap(), outcome);
        }
    }
}
