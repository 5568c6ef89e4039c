//! What must still be said to the store about a token that nobody uses any more.

use std::{sync::Arc, time::Duration};

use tokio::time::{Instant, sleep, sleep_until};

use crate::{
    call::within,
    client::Core,
    giving_back::{give_back, heir},
    spec::{DEFAULT_LEASE, call_timeout},
    store::{Hold, Release, StoreError, Token},
};

/// How long a clean-up waits after its first failure; twice as long after each further one, up to the longest.
pub(crate) const FIRST_PAUSE: Duration = Duration::from_millis(50);
pub(crate) const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// A token to be given up: said until the store has heard it, or until the lease has run out in any case.
#[derive(Debug)]
pub(crate) struct CleanUp {
    what: What,
    /// A release that names a `next` was sent before, and nobody knows what came of it.
    sent_before: bool,
    /// A straggling request may be executed until then: say it once more afterwards (PROTOCOL 8).
    straggler_until: Option<Instant>,
    give_up_at: Instant,
}

#[derive(Debug)]
enum What {
    Release(Release),
    Abandon(Hold),
}

impl CleanUp {
    /// The release of a lock whose lease ends by itself within `lease`.
    pub(crate) fn release(release: Release, lease: Duration) -> Self {
        let give_up_at = Instant::now() + lease;
        Self {
            what: What::Release(release),
            sent_before: false,
            straggler_until: None,
            give_up_at,
        }
    }

    /// The same for a release that was sent, and whose reply did not come.
    pub(crate) fn release_again(release: Release, lease: Duration) -> Self {
        Self {
            sent_before: true,
            ..Self::release(release, lease)
        }
    }

    /// Gives up a token. `straggler_until` is the deadline of a request whose outcome is not known.
    pub(crate) fn abandon(hold: Hold, lease: Duration, straggler_until: Option<Instant>) -> Self {
        let give_up_at = straggler_until.unwrap_or_else(Instant::now) + lease;
        Self {
            what: What::Abandon(hold),
            sent_before: false,
            straggler_until,
            give_up_at,
        }
    }

    fn hold(&self) -> &Hold {
        match &self.what {
            What::Release(release) => &release.hold,
            What::Abandon(hold) => hold,
        }
    }

    pub(super) fn token(&self) -> Token {
        self.hold().token
    }

    async fn say(&self, core: &Core) -> Result<(), StoreError> {
        let patience = call_timeout(DEFAULT_LEASE);
        let said = async {
            match &self.what {
                What::Release(release) => {
                    // Who was to take it up again is not waited for any more.
                    let release = Release {
                        next: None,
                        ..release.clone()
                    };
                    core.store.release(&release).await.map(drop)
                }
                What::Abandon(hold) => core.store.abandon(hold).await,
            }
        };
        within(patience, said).await
    }

    pub(super) async fn run(&self, core: Arc<Core>) {
        let Hold { key, mode, .. } = self.hold();
        let next = match &self.what {
            What::Release(release) => release.next.map(|next| (release, next)),
            What::Abandon(_) => None,
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
                    core.gates.released(key, mode.family());
                    sleep_until(deadline + Duration::from_millis(1)).await;
                }
                (Ok(()), _) => {
                    if matches!(self.what, What::Release(_)) {
                        tracing::debug!(%key, "released");
                    }
                    break;
                }
                (Err(error), _) if !error.is_transient() || Instant::now() >= self.give_up_at => {
                    tracing::warn!(%key, %error, "gave up giving a lock back; its lease ends it");
                    break;
                }
                (Err(_), _) => {
                    // Many may have failed together; they need not come again together.
                    sleep(pause.mul_f64(0.5 + 0.5 * rand::random::<f64>())).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
            }
        }
        core.gates.released(key, mode.family());
        if let Some((release, next)) = next {
            // From now on the first release changes nothing any more, should it be executed late.
            core.driver.clean_up(
                &core,
                CleanUp::abandon(heir(release, next), next.lease, None),
            );
        }
    }
}
