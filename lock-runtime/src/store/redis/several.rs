//! Acquires several keys at once. The keys of one slot are acquired by one script. The slots of a
//! cluster are acquired one after another, in an order that is the same for all clients, so that
//! of two requests for the same keys one gets them all.

use futures_util::future::join_all;

use super::{RedisStore, reply::unexpected};
use crate::store::{AcquireAllReply, KeyRequest, StoreError};

impl RedisStore {
    /// Acquires all locks or none. After an error the state of each is unknown, and the caller
    /// abandons them all.
    pub(super) async fn acquire_several(
        &self,
        requests: &[KeyRequest],
    ) -> Result<AcquireAllReply, StoreError> {
        let slots = self.servers.by_slot(requests);
        if slots.len() <= 1 {
            return self.acquire_each(requests).await;
        }
        let mut grants = vec![None; requests.len()];
        for (taken, indices) in slots.iter().enumerate() {
            let some: Vec<_> = indices
                .iter()
                .map(|index| requests[*index].clone())
                .collect();
            match self.acquire_each(&some).await? {
                AcquireAllReply::Granted(granted) => {
                    indices
                        .iter()
                        .zip(granted)
                        .for_each(|(index, grant)| grants[*index] = Some(grant));
                }
                AcquireAllReply::Refused { index, reply } => {
                    // A refused caller expects to hold nothing, and does not abandon
                    // anything itself.
                    let held = slots[..taken]
                        .iter()
                        .flatten()
                        .map(|index| self.abandon_one(&requests[*index].hold));
                    for abandoned in join_all(held).await {
                        abandoned?;
                    }
                    return Ok(AcquireAllReply::Refused {
                        index: indices[index],
                        reply,
                    });
                }
            }
        }
        grants
            .into_iter()
            .collect::<Option<Vec<_>>>()
            .map(AcquireAllReply::Granted)
            .ok_or_else(unexpected)
    }
}
