//! A table of entries with numeric ids. The id of a removed entry stays invalid when its slot is
//! reused.

use std::{
    fmt,
    marker::PhantomData,
    ops::{Index, IndexMut},
};

/// The id of an entry in a [`Slab`].
pub(crate) struct Id<T> {
    index: u32,
    generation: u32,
    of: PhantomData<fn() -> T>,
}

impl<T> Id<T> {
    fn bits(self) -> u64 {
        u64::from(self.index) << 32 | u64::from(self.generation)
    }

    /// The index of the slot, which may be reused after the entry is removed.
    pub(crate) fn slot(self) -> usize {
        self.index as usize
    }
}

impl<T> Clone for Id<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Id<T> {}

impl<T> PartialEq for Id<T> {
    fn eq(&self, other: &Self) -> bool {
        self.bits() == other.bits()
    }
}

impl<T> Eq for Id<T> {}

impl<T> PartialOrd for Id<T> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for Id<T> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.bits().cmp(&other.bits())
    }
}

impl<T> fmt::Debug for Id<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}.{}", self.index, self.generation)
    }
}

#[cfg_attr(test, derive(Clone))]
pub(crate) struct Slab<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
    /// The generation of new slots: no id of an earlier slot has it.
    generation: u32,
}

#[cfg_attr(test, derive(Clone))]
struct Slot<T> {
    generation: u32,
    value: Option<T>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            generation: 0,
        }
    }
}

/// With more slots than this, an empty slab frees their memory.
const KEPT: usize = 1024;

impl<T> Slab<T> {
    #[inline]
    pub(crate) fn insert(&mut self, value: T) -> Id<T> {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot {
                generation: self.generation,
                value: None,
            });
            (self.slots.len() - 1) as u32
        });
        let slot = &mut self.slots[index as usize];
        slot.value = Some(value);
        Id {
            index,
            generation: slot.generation,
            of: PhantomData,
        }
    }

    #[inline]
    pub(crate) fn get(&self, id: Id<T>) -> Option<&T> {
        let slot = self.slots.get(id.slot())?;
        (slot.generation == id.generation).then_some(slot.value.as_ref()?)
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, id: Id<T>) -> Option<&mut T> {
        let slot = self.slots.get_mut(id.slot())?;
        (slot.generation == id.generation).then_some(slot.value.as_mut()?)
    }

    #[inline]
    pub(crate) fn remove(&mut self, id: Id<T>) -> Option<T> {
        self.get(id)?;
        // The value is moved once, to the caller: it is taken last.
        if self.len() == 1 && self.slots.len() > KEPT {
            return self.remove_all().slots[id.slot()].value.take();
        }
        self.vacate(id).value.take()
    }

    /// Removes an entry and drops it in its place.
    #[inline]
    pub(crate) fn discard(&mut self, id: Id<T>) {
        if self.get(id).is_none() {
            return;
        }
        if self.len() == 1 && self.slots.len() > KEPT {
            self.remove_all();
        } else {
            self.vacate(id).value = None;
        }
    }

    /// Makes the slot of an entry available to others.
    fn vacate(&mut self, id: Id<T>) -> &mut Slot<T> {
        self.free.push(id.index);
        let slot = &mut self.slots[id.slot()];
        slot.generation = slot.generation.wrapping_add(1);
        slot
    }

    /// Returns all slots, with a last entry, and starts again without any.
    #[cold]
    fn remove_all(&mut self) -> Self {
        let used = self.slots.iter().map(|slot| slot.generation).max();
        let empty = Self {
            generation: used.unwrap_or(0).wrapping_add(1),
            ..Self::default()
        };
        std::mem::replace(self, empty)
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Id<T>, &T)> {
        self.slots.iter().zip(0..).filter_map(|(slot, index)| {
            let id = Id {
                index,
                generation: slot.generation,
                of: PhantomData,
            };
            Some((id, slot.value.as_ref()?))
        })
    }

    pub(crate) fn ids(&self) -> Vec<Id<T>> {
        self.iter().map(|(id, _)| id).collect()
    }
}

/// Indexing with the ids of entries that cannot have been removed.
impl<T> Index<Id<T>> for Slab<T> {
    type Output = T;

    #[expect(clippy::expect_used, reason = "the entry cannot have been removed")]
    fn index(&self, id: Id<T>) -> &T {
        self.get(id).expect("the entry exists")
    }
}

impl<T> IndexMut<Id<T>> for Slab<T> {
    #[expect(clippy::expect_used, reason = "the entry cannot have been removed")]
    fn index_mut(&mut self, id: Id<T>) -> &mut T {
        self.get_mut(id).expect("the entry exists")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// No id is used for two entries, and the id of a removed entry stays invalid when its slot
        /// is reused.
        #[test]
        fn no_id_is_used_again(steps in proptest::collection::vec((any::<bool>(), any::<prop::sample::Index>()), 1..200)) {
            let mut slab = Slab::default();
            let mut issued: Vec<Id<usize>> = Vec::new();
            let mut living = BTreeMap::new();
            for (value, (inserts, index)) in steps.into_iter().enumerate() {
                if inserts || issued.is_empty() {
                    let id = slab.insert(value);
                    prop_assert!(!issued.contains(&id));
                    prop_assert!(living.keys().all(|other: &Id<usize>| other.slot() != id.slot()));
                    issued.push(id);
                    living.insert(id, value);
                } else {
                    let id = issued[index.index(issued.len())];
                    prop_assert_eq!(slab.remove(id), living.remove(&id));
                }
                for id in &issued {
                    prop_assert_eq!(slab.get(*id), living.get(id));
                    prop_assert_eq!(slab.get_mut(*id).copied(), living.get(id).copied());
                }
                prop_assert_eq!((slab.len(), slab.is_empty()), (living.len(), living.is_empty()));
                let listed: BTreeMap<_, _> = slab.iter().map(|(id, value)| (id, *value)).collect();
                prop_assert_eq!(&listed, &living);
                prop_assert_eq!(slab.ids().len(), living.len());
            }
        }
    }
}
