//! The clients: warehouses that reserve and release pieces, and an auditor that counts the stock.

use std::{sync::Once, time::Duration};

use lock_examples::inventory::{Item, Pieces, Place, inventory_client::InventoryClient};
use tokio::time::sleep;
use tonic::{Code, Request, Response, Status, metadata::MetadataValue, transport::Channel};
use tonic_types::StatusExt;

use crate::ITEMS;

/// A connection to the server, and the results of all requests on it.
pub(crate) struct Client {
    inventory: InventoryClient<Channel>,
    pub(crate) ledger: Ledger,
}

/// Counts of the server's responses.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ledger {
    /// The number of reserved pieces of each item.
    pub(crate) reserved: [u64; ITEMS.len()],
    pub(crate) sold_out: u64,
    /// Refusals with a retry delay. These requests had no effect.
    pub(crate) refused: u64,
    /// All other errors.
    pub(crate) errors: u64,
}

impl Client {
    pub(crate) async fn connect(url: &str) -> anyhow::Result<Self> {
        Ok(Self {
            inventory: InventoryClient::connect(url.to_owned()).await?,
            ledger: Ledger::default(),
        })
    }

    /// Makes `orders` orders of one to three pieces, of each item in turn, and releases every
    /// fourth order.
    pub(crate) async fn order(mut self, orders: u64) -> Ledger {
        for (number, index) in (0..orders).zip((0..ITEMS.len()).cycle()) {
            let pieces = Pieces {
                item: ITEMS[index].to_owned(),
                quantity: 1 + number % 3,
            };
            let reserve = async |client: &mut InventoryClient<_>| {
                client.reserve(of(ITEMS[index], pieces.clone())).await
            };
            if self.patiently(reserve).await.is_none() {
                continue;
            }
            self.ledger.reserved[index] += pieces.quantity;
            let release = async |client: &mut InventoryClient<_>| {
                client.release(of(ITEMS[index], pieces.clone())).await
            };
            if number % 4 == 0 && self.patiently(release).await.is_some() {
                self.ledger.reserved[index] -= pieces.quantity;
            }
        }
        self.ledger
    }

    /// Counts the pieces of an item on the shelf and set aside. `None` if the response is
    /// incomplete.
    pub(crate) async fn count(&mut self, item: &'static str) -> Option<[u64; 2]> {
        let named = Item {
            item: item.to_owned(),
        };
        let count = async |client: &mut InventoryClient<_>| {
            client.count_stock(of(item, named.clone())).await
        };
        let mut places = self.patiently(count).await?;
        let mut counted = Vec::new();
        loop {
            match places.message().await {
                Ok(Some(Place { quantity, .. })) => counted.push(quantity),
                Ok(None) => return counted.try_into().ok(),
                Err(status) => {
                    self.note(&status);
                    return None;
                }
            }
        }
    }

    /// Retries a request as long as the server returns a retry delay, and gives up on any other
    /// error.
    async fn patiently<T>(
        &mut self,
        request: impl AsyncFn(&mut InventoryClient<Channel>) -> Result<Response<T>, Status>,
    ) -> Option<T> {
        loop {
            match request(&mut self.inventory).await {
                Ok(response) => return Some(response.into_inner()),
                Err(status) => sleep(self.note(&status)?).await,
            }
        }
    }

    /// Counts an error, and returns the server's retry delay, if there is one.
    fn note(&mut self, status: &Status) -> Option<Duration> {
        let retry = status
            .get_error_details()
            .retry_info()
            .and_then(|info| info.retry_delay);
        match retry {
            Some(delay) => {
                // Only the first is shown; the others are alike.
                static SHOWN: Once = Once::new();
                SHOWN.call_once(|| {
                    println!(
                        "refused: {:?}, retry in {delay:?}. {}",
                        status.code(),
                        status.message()
                    );
                });
                self.ledger.refused += 1;
            }
            None if status.code() == Code::FailedPrecondition => self.ledger.sold_out += 1,
            None => {
                eprintln!("inventory: {status}");
                self.ledger.errors += 1;
            }
        }
        retry
    }
}

/// Creates a request with its item in the metadata, where the layer can read it.
fn of<T>(item: &'static str, message: T) -> Request<T> {
    let mut request = Request::new(message);
    request
        .metadata_mut()
        .insert("x-item", MetadataValue::from_static(item));
    request
}

impl Ledger {
    pub(crate) fn add(mut self, other: Self) -> Self {
        for (sum, more) in self.reserved.iter_mut().zip(other.reserved) {
            *sum += more;
        }
        self.sold_out += other.sold_out;
        self.refused += other.refused;
        self.errors += other.errors;
        self
    }
}
