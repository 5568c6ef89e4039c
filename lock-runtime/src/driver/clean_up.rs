//! The remaining calls to the store for a token that is no longer used.

use std::{sync::Arc, time::Duration};

use tokio::time::{Instant, sleep, sleep_until};

use crate::{
    call::within,
    client::Core,
    giving_back::{give_back, heir},
    spec::{DEFAULT_LEASE, call_timeout},
    store::{Hold, Release, StoreError, Token},
};

/// The pause of a clean-up after its first failure. It doubles after each further failure, up to
/// the longest pause.
pub(crate) const FIRST_PAUSE: Duration = Duration::from_millis(50);
pub(crate) const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// A token to be released or abandoned. The call is repeated until the store has confirmed it, or
/// until the lease has expired in any case.
#[derive(Debug)]
pub(crate) struct CleanUp {
    action: Action,
    /// A release that names a `next` was sent before, and its outcome is unknown.
    sent_before: bool,
    /// A delayed request may be executed until then. The call is repeated once after
    /// that (PROTOCOL 8).
    straggler_until: Option<Instant>,
    give_up_at: Instant,
}

#[derive(Debug)]
enum Action {
    Release(Release),
    Abandon(Hold),
}

impl CleanUp {
    /// The release of a lock whose lease ends within `lease` in any case.
    pub(crate) fn release(release: Release, lease: Duration) -> Self {
        let give_up_at = Instant::now() + lease;
        Self {
            action: Action::Release(release),
            sent_before: false,
            straggler_until: None,
            give_up_at,
        }
    }

    /// The same for a release that was sent and got no reply.
    pub(crate) fn release_again(release: Release, lease: Duration) -> Self {
        Self {
            sent_before: true,
            ..Self::release(release, lease)
        }
    }

    /// The abandonment of a token. `straggler_until` is the deadline of a request whose
    /// outcome is unknown.
    pub(crate) fn abandon(hold: Hold, lease: Duration, straggler_until: Option<Instant>) -> Self {
        let give_up_at = straggler_until.unwrap_or_else(Instant::now) + lease;
        Self {
            action: Action::Abandon(hold),
            sent_before: false,
            straggler_until,
            give_up_at,
        }
    }

    fn hold(&self) -> &Hold {
        match &self.action {
            Action::Release(release) => &release.hold,
            Action::Abandon(hold) => hold,
        }
    }

    pub(super) fn token(&self) -> Token {
        self.hold().token
    }

    async fn say(&self, core: &Core) -> Result<(), StoreError> {
        let patience = call_timeout(DEFAULT_LEASE);
        let said = async {
            match &self.action {
                Action::Release(release) => {
                    // The waiters that were to take up the lock again no longer rely
                    // on this release.
                    let release = Release {
                        next: None,
                        ..release.clone()
                    };
                    core.store.release(&release).await.map(drop)
                }
                Action::Abandon(hold) => core.store.abandon(hold).await,
            }
        };
        within(patience, said).await
    }

    pub(super) async fn run(&self, core: Arc<Core>) {
        let Hold { key, mode, .. } = self.hold();
        let next = match &self.action {
            Action::Release(release) => release.next.map(|next| (release, next)),
            Action::Abandon(_) => None,
        };
        if let Some((release, next)) = next {
            if !self.sent_before
                && give_back(&core, release, call_timeout(DEFAULT_LEASE))
                    .await
                    .is_ok()
            {
                tracing::debug!(%key, "released");
                return;
            }
            core.gates.drop_place(&heir(release, next));
        }
        let mut pause = FIRST_PAUSE;
        loop {
            let sent = Instant::now();
            match (self.say(&core).await, self.straggler_until) {
                (Ok(()), Some(deadline)) if sent <= deadline => {
                    core.gates.released(key, mode.kind());
                    sleep_until(deadline + Duration::from_millis(1)).await;
                }
                (Ok(()), _) => {
                    if matches!(self.action, Action::Release(_)) {
                        tracing::debug!(%key, "released");
                    }
                    break;
                }
                (Err(error), _) if !error.is_transient() || Instant::now() >= self.give_up_at => {
                    tracing::warn!(%key, %error, "gave up releasing a lock; it ends with its lease");
                    break;
                }
                (Err(_), _) => {
                    // Many clean-ups may have failed together; they need not be retried together.
                    sleep(pause.mul_f64(0.5 + 0.5 * rand::random::<f64>())).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
            }
        }
        core.gates.released(key, mode.kind());
        if let Some((release, next)) = next {
            // From now on the first release has no effect if it is executed late.
            core.driver.clean_up(
                &core,
                CleanUp::abandon(heir(release, next), next.lease, None),
            );
        }
    }
}
