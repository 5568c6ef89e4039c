//! The job, and its outcome on a replica.

use std::{fmt, str::FromStr, time::Duration};

use lock_runtime::{LockError, LockErrorKind, distributed_lock};
use rand::seq::IteratorRandom;
use tokio::time::sleep;

/// The number of winners.
const WINNERS: usize = 10;
/// The time for drawing one winner.
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

/// Draws the winners: on one replica, once.
///
/// - `no_wait`: a replica that does not get the lock at once has nothing to do.
/// - `min_hold`: the draw is short, and clocks differ. The lock is held for longer than the
///   difference of any two clocks.
/// - `lease`: if the drawing replica dies, another one may draw after the lease has expired.
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

/// The outcome of the job on one replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Drew(Vec<String>),
    Skipped,
    Failed(String),
}

/// Runs the job like a scheduler.
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
            _ => anyhow::bail!("{line:?} is not the outcome of a replica"),
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
