({
  init: config => ({ mails: config.mails.map(mail => ({ ...mail, place: 'inbox', star: false })), open: null,
    submitted: false }),
  view: (state, kit) => {
    const mail = state.mails.find(entry => entry.id === state.open);
    const move = place => kit.go(() => { mail.place = place; state.open = null; });
    if (mail) {
      return [kit.bar(kit.button('back', 'Back', kit.go(() => { state.open = null; }))),
        kit.bar(kit.text(`From ${mail.sender}: ${mail.subject}`)), kit.bar(kit.text(mail.body, 'note')),
        kit.bar(kit.button('archive', 'Archive', move('archive')), kit.button('trash', 'Delete', move('trash')),
          kit.button('star', mail.star ? 'Remove star' : 'Star', kit.set(() => { mail.star = !mail.star; })))];
    }
    const inbox = state.mails.filter(entry => entry.place === 'inbox');
    return [kit.bar(kit.text(`${inbox.length} in the inbox`, 'note')),
      ...inbox.map(entry => kit.row(`${entry.sender}: ${entry.subject}`,
        kit.text(`${entry.star ? '* ' : ''}${entry.sender}: ${entry.subject}`),
        kit.button(`open-${entry.id}`, 'Open', kit.go(() => { state.open = entry.id; }))))];
  },
  goals: (state, config) => {
    const mail = id => state.mails.find(entry => entry.id === id);
    const met = { archive: id => mail(id).place === 'archive', trash: id => mail(id).place === 'trash',
      star: id => mail(id).star && mail(id).place === 'inbox' };
    const touched = config.wanted.map(want => want.id);
    const kept = state.mails.every(entry => (touched.includes(entry.id) || entry.place === 'inbox')
      && (!entry.star || config.wanted.some(want => want.id === entry.id && want.kind === 'star')));
    return [...config.wanted.map(want => met[want.kind](want.id)), kept];
  },
})
