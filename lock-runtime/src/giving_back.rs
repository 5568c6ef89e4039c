//! A release call, and the consequences of its reply for the waiters of this process.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use crate::{
    call::within,
    client::Core,
    driver::CleanUp,
    gate::{Baton, Budget},
    lease::Lease,
    spec::Mode,
    store::{Hold, NextHolder, Release, ReleaseReply, StoreError},
};

/// The hold that takes up the lock again after `release`.
pub(crate) fn heir(release: &Release, next: NextHolder) -> Hold {
    Hold::new(release.hold.key.clone(), Mode::Exclusive, next.token)
}

/// Sends a release and waits for its reply, for at most `patience`. The local queue continues
/// with the outcome. After an error, or when the future is dropped, a release that names a `next`
/// must be followed by [`CleanUp::release_again`].
pub(crate) async fn give_back(
    core: &Arc<Core>,
    release: &Release,
    patience: Duration,
) -> Result<ReleaseReply, StoreError> {
    let Some(next) = release.next else {
        let reply = within(patience, core.store.release(release)).await?;
        core.gates
            .released(&release.hold.key, release.hold.mode.kind());
        return Ok(reply);
    };
    let sent = Instant::now();
    let reply = within(patience, core.store.release(release)).await?;
    let hold = heir(release, next);
    match reply {
        ReleaseReply::Passed(grant) => {
            let lease = Lease::granted(next.lease, true, sent, grant.ttl, rand::random());
            let budget = Budget::new(grant.reserved, sent, Instant::now());
            let baton = Baton {
                hold,
                fence: grant.fence,
                lease,
                budget,
            };
            if let Err(hold) = core.gates.handed_back(baton) {
                // The waiters have left in the meantime.
                core.driver
                    .clean_up(core, CleanUp::release(Release::new(hold), next.lease));
            }
        }
        ReleaseReply::Queued {
            counter,
            holder_ttl,
        } => {
            if !core.gates.queued_again(&hold, sent, counter, holder_ttl) {
                core.driver
                    .clean_up(core, CleanUp::abandon(hold, next.lease, None));
            }
        }
        ReleaseReply::Released | ReleaseReply::NotHeld => core.gates.drop_place(&hold),
    }
    Ok(reply)
}
