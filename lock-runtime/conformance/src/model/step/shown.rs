//! The text of a step.

use std::{fmt, ops::Deref};

use lock_runtime::store::{Hold, Token};

use super::Step;

/// A step, and the tokens that its text refers to.
pub(in crate::model) struct Shown {
    step: Step,
    /// The text shows the index of a token.
    known: Vec<Token>,
}

impl Shown {
    pub(in crate::model) fn new(step: Step, known: Vec<Token>) -> Self {
        Self { step, known }
    }
}

impl Deref for Shown {
    type Target = Step;

    fn deref(&self) -> &Step {
        &self.step
    }
}

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let token = |token: &Token| {
            self.known
                .iter()
                .position(|known| known == token)
                .unwrap_or_default()
        };
        let hold = |hold: &Hold| format!("{} {:?} #{}", hold.key, hold.mode, token(&hold.token));
        match &self.step {
            Step::Acquire {
                hold: of,
                lease,
                late,
                queue,
                reserved,
            } => {
                let how = format!(
                    "{}{}",
                    if *late { ", late" } else { "" },
                    if *queue { ", queued" } else { "" }
                );
                write!(
                    f,
                    "acquire {} for {lease:?}{how}, {reserved} reserved",
                    hold(of)
                )
            }
            Step::AcquireAll { holds, lease } => {
                write!(
                    f,
                    "acquire all [{}] for {lease:?}",
                    holds.iter().map(hold).collect::<Vec<_>>().join(", ")
                )
            }
            Step::Poll(of) => write!(f, "poll {}", hold(of)),
            Step::Renew(renewals) => {
                let renewals = renewals
                    .iter()
                    .map(|(of, lease)| format!("{} for {lease:?}", hold(of)));
                write!(f, "renew [{}]", renewals.collect::<Vec<_>>().join(", "))
            }
            Step::Release {
                hold: of,
                keep_for,
                next,
            } => {
                let next = next.map(|next| (token(&next.token), next.lease, next.reserved));
                write!(
                    f,
                    "release {}, keep for {keep_for:?}, next {next:?}",
                    hold(of)
                )
            }
            Step::Complete {
                hold: of,
                keep_for,
                result,
            } => write!(
                f,
                "complete {} for {keep_for:?} with {}",
                hold(of),
                result.escape_ascii()
            ),
            Step::Look(key) => write!(f, "look at {key}"),
            Step::Forget(key) => write!(f, "forget {key}"),
            Step::Convert(of) => write!(f, "convert {}", hold(of)),
            Step::Abandon(of) => write!(f, "abandon {}", hold(of)),
            Step::Inspect(key, kind) => write!(f, "inspect {key} {kind:?}"),
            Step::Revoke(key, kind, scope) => write!(f, "revoke {key} {kind:?} {scope:?}"),
        }
    }
}
